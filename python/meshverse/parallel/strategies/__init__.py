"""FSDP2 and Megatron-FSDP: models split and sharded on a trainer's meshes."""
