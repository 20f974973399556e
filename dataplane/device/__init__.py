"""Host memory and devices: the named devices, and copies to them that run beside the device's computations."""
