//! The layout shared by node agent and limiter: quota file, region and their rules. no_std.
