"""The wire protocols: messages, frames, and the local channel that carries them and descriptors."""
