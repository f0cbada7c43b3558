"""Fused Triton kernels and recorded CUDA graphs for NVIDIA GPUs."""
