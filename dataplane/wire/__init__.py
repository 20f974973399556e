"""What crosses a socket: messages, frames, and the local channel that carries them and descriptors."""
