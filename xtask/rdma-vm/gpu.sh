#!/bin/sh
# gpu.sh COMMAND [ARG]...: in the VM, runs a command that finds the emulated GPUs whose library,
# compiled kernels and compiler's answers were carried into /gpu.
# One library stands for several: a copy for each name would be as many machines.
for name in libcuda.so.1 libcuda.so libnvrtc.so.13; do
    ln -sf libgpu_emulator.so /gpu/$name
done
export LD_LIBRARY_PATH=/gpu EP_NVRTC_PATH=/gpu EP_KERNEL_CACHE=/gpu/kernels
export EP_EMULATOR_CXX=/gpu/cxx.sh EP_CXX_ANSWERS=/gpu/answers
exec "$@"
