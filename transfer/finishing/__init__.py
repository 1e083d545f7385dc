"""What is made of shells once they are filled: forms that kernels take, and tensors derived from placed ones."""
