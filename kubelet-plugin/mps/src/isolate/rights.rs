//! Limits root's rights of a daemon to those that NVIDIA's programs were seen to use, with no way to get
//! others.

use super::{IsolateError, Part, Role, step};
use nix::unistd::{Gid, setgid, setgroups};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use std::path::Path;

/// Returns the capabilities that a process keeps.
fn kept(role: Role) -> CapabilitySet {
    match role {
        // A server runs as the user of its clients, and is ended by the control daemon. Its sockets are
        // root's or open to all, and its directories are root's. So it needs no right over files.
        Role::Daemon => CapabilitySet::SETUID.union(CapabilitySet::KILL),
        // The program speaks to a socket of root's.
        Role::Control => CapabilitySet::empty(),
    }
}

/// Gives up all other rights, for this process and all that it starts.
pub(super) fn give_up(part: Part) -> Result<(), IsolateError> {
    let own = Path::new("/proc/self");
    setgroups(&[])
        .and_then(|()| setgid(Gid::from_raw(part.group)))
        .map_err(step("change the groups of", own))?;
    drop_all_but(kept(part.role)).map_err(|errno| IsolateError::Step {
        what: "give up the rights of",
        path: own.to_owned(),
        error: errno.into(),
    })
}

fn drop_all_but(kept: CapabilitySet) -> rustix::io::Result<()> {
    clear_ambient_capability_set()?;
    for capability in (0..u64::BITS).map(|number| CapabilitySet::from_bits_retain(1 << number)) {
        // For capabilities above those that it knows, the kernel returns an error.
        if !kept.contains(capability) && capability_is_in_bounding_set(capability) == Ok(true) {
            remove_capability_from_bounding_set(capability)?;
        }
    }
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    set_no_new_privs(true)
}
