"""An `npu` that is the CPU by another name: what runs on it names no other device."""
