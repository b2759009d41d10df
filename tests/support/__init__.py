"""What only the tests use: boxes, servers, engines and hostile peers, made for them."""
