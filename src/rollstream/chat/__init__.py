"""How messages become token ids and back."""
