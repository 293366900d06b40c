//! What a machine is: GPUs, links, NICs, SM domains, and the margin arithmetic over them.
