"""logitless: one model, one tensor graph, served and fine-tuned on CPU, OpenCL and Vulkan."""
