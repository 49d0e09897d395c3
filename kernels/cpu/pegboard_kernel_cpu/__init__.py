"""Native CPU kernels: C compiled for the machine it runs on, called through ctypes."""
