"""What to say: sessions, how a model's template renders them, and what each token of the result is."""
