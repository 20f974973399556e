"""verl: a storage backend for its TransferQueue."""
