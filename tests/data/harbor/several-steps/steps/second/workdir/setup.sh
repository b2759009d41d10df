touch made-by-setup
