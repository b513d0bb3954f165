"""The parts of `train_lm.py`: one concept a file, none of them longer than a few screens."""
