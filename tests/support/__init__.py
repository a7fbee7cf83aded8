"""What tests share: real processes, twins, models, loops. No test file imports from another one."""
