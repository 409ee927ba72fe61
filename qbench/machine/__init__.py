"""What is known of the machine that runs: devices, versions, costs, and its quiet terminal."""
