"""FSDP2, Megatron-FSDP and context parallelism on a trainer's meshes."""
