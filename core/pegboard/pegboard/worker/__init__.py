"""What runs on a rank: the loading of the model, the memory and the step."""

from pegboard.env import let_compute_threads_sleep

let_compute_threads_sleep()  # must run before torch is imported, which the modules below do
