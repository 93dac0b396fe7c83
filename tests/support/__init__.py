"""What several tests share: devices, inputs, the accuracy rule, the form of errors."""
