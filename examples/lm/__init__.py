"""The parts of `train_lm.py`: one concept per file, each a few screens long at most."""
