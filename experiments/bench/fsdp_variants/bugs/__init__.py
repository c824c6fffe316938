"""What turned out to be torch's own: the smallest script of each, in torch alone. Each prints what it shows, on two processes."""
