"""The ops of the mechanisms that the papers compare with: plain PyTorch, one form each."""
