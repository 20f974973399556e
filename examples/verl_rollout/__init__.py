"""A multimodal GRPO step with verl's own classes, with DataProtos by value or by reference."""
