"""What runs on a rank: loading the model, the memory, the step."""

from pegboard.env import let_compute_threads_sleep

let_compute_threads_sleep()  # before torch, which everything below imports
