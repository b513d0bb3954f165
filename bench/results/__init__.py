"""The results page and pictures, made from records."""
