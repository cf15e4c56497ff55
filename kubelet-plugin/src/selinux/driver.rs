//! Reports whether confined containers may use the driver's files.

use super::denied;
use crate::args::Args;
use crate::events::Events;
use crate::prepare::Node;
use crate::{notice, reasons};
use aliquot_selinux::Policy;
use std::sync::Arc;

/// Reports where SELinux keeps containers from the driver's files. This can be found out only if the host's
/// selinuxfs is visible: below the driver's root if that is the host's root, or in the tree of the host's
/// first process.
pub async fn tell(args: &Args, node: &Arc<Node>, events: &Events) {
    if !node.machine.labels.are_given() {
        return;
    }
    let roots = [&args.driver_root, &args.host_proc.join("1/root")].map(|root| root.join("sys"));
    let sys = [&args.sys_root].into_iter().chain(&roots);
    let Some(policy) = Policy::find(sys.map(|sys| sys.join("fs/selinux"))) else {
        tracing::info!("no selinuxfs is seen: whether containers may use the driver's files is not known");
        return;
    };
    let (worker, container) = (Arc::clone(node), args.selinux_container_label.clone());
    let look = move || {
        let machine = &worker.machine;
        denied(&policy, &container, &machine.driver, &machine.site.capabilities)
    };
    match tokio::task::spawn_blocking(look).await {
        Ok(Ok(found)) if found.is_empty() => {}
        Ok(Ok(found)) => events.node_warning(
            reasons::SELINUX_DRIVER_DENIED,
            notice::driver_denied(&args.selinux_container_label, &found),
        ),
        Ok(Err(error)) => {
            tracing::warn!(%error, "whether containers may use the driver's files is not known")
        }
        Err(error) => tracing::warn!(%error, "looking at the labels of the driver's files ended abnormally"),
    }
}
