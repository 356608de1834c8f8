"""The RL collectives: vocabulary-parallel scoring, the distributed advantage reducer, rendezvous."""
