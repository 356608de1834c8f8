"""What a step costs on many nodes: stages by the planner, stragglers by the scheduler's simulation, failures."""
