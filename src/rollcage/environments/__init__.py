"""Remote environments that agents work on: provisioned and judged out here, their tools served into the box."""
