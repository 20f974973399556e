"""Integrations with verl: `proto` for its DataProto and single controller; a storage backend for its TransferQueue."""
