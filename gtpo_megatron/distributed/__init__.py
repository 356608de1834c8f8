"""Everything that talks to other ranks: vocabulary-parallel scoring and the distributed advantage reducer."""
