"""What is counted over all blocks, once, in the background: the length of every row, and the bins it leads to."""
