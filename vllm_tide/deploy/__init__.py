"""What served traffic decides: when to train, which draft is served, and going back."""
