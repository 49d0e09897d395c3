"""Native CPU kernels: C code, compiled for the machine it runs on and called through ctypes."""
