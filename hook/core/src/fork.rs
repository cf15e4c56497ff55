//! Everything that a forked child forgets, because it is the parent's.

use crate::compute::book as compute;
use crate::contexts::book as contexts;
use crate::graphs::book as graphs;
use crate::pools::{book as pools, growth};
use crate::vmm::book as vmm;
use crate::{account, allocations, captures, config, device, log, shared};

/// Forgets everything that is the parent's, in a forked child.
pub(crate) fn renew() {
    config::renew_after_fork();
    account::renew_after_fork();
    device::renew_after_fork();
    allocations::renew_after_fork();
    pools::renew_after_fork();
    growth::renew_after_fork();
    graphs::renew_after_fork();
    vmm::renew_after_fork();
    shared::renew_after_fork();
    contexts::renew_after_fork();
    compute::renew_after_fork();
    captures::renew_after_fork();
    log::renew_after_fork();
}
