"""Integrations with verl: `proto` for its DataProto and single controller; `plugin` for its TransferQueue."""
