// The loops of elementwise kernels on the CPU, once more: the modules share no symbols.
#include "elementwise/elementwise_cpu.cpp"
