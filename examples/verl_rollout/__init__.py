"""A multimodal GRPO step of verl's own classes, with DataProtos by value or by reference."""
