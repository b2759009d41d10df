"""What the server and its clients say to each other: requests, answers, refusals. No HTTP in it."""
