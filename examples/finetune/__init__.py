"""The parts of finetune_hf.py."""
