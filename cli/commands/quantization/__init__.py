"""Commands about the precision of weights: quantization and importance matrices."""
