"""Transfers of tensors between meshes: descriptions, plans and the exchange of messages."""
