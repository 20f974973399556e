"""Between host memory and devices: which device is meant, and copies to it that run beside what the device computes."""
