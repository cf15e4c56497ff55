//! A node of simulated GPUs: board tables, MIG life, memory accounting and faults in one shared file.
