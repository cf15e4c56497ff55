//! Claims that tolerate the taint that keeps kube-scheduler away from this driver's devices.

use super::{Reconciler, Regarding, Report, reasons};
use aliquot_allocator::snapshot::{ObjectKey, Taint, Uid, tolerated};
use k8s_openapi::api::resource::v1::DeviceToleration;

impl Reconciler {
    /// Warns about claims that tolerate this taint, because kube-scheduler could give them devices that only
    /// this driver allocates.
    pub(super) fn tell_who_tolerates_our_taint(&mut self) {
        let ours = Taint {
            key: self.index.controller_taint().into(),
            value: "".into(),
            effect: "NoSchedule".into(),
        };
        let driver = self.index.driver().to_owned();
        let suspects: Vec<(ObjectKey, Uid, String)> = self
            .index
            .claims()
            .flat_map(|claim| {
                let requests =
                    claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
                requests.flat_map(move |request| {
                    let exact = request.exactly.iter().map(|e| (&e.device_class_name, &e.tolerations));
                    let subs = request.first_available.iter().flatten();
                    exact
                        .chain(subs.map(|sub| (&sub.device_class_name, &sub.tolerations)))
                        .map(move |(class, tolerations)| (claim, request.name.clone(), class, tolerations))
                })
            })
            .filter(|(_, _, _, tolerations)| {
                tolerations.as_deref().is_some_and(|t: &[DeviceToleration]| tolerated(&ours, t))
            })
            .filter(|(_, _, class, _)| {
                self.index.class(class).is_none_or(|class| self.matcher.may_select(&driver, class))
            })
            .map(|(claim, request, _, _)| (claim.key.clone(), claim.uid.clone(), request))
            .collect();
        for (key, uid, request) in suspects {
            tracing::warn!(claim = %key, request, "tolerates the controller's taint");
            self.tell(Report {
                regarding: Regarding::Claim(key, uid),
                warning: true,
                reason: reasons::TOLERATES,
                note: format!(
                    "request {request} tolerates the taint {}, so kube-scheduler could give it devices that the \
                     controller gives to others; make the claim anew without that toleration, and keep nodes in \
                     scheduler mode until then",
                    ours.key
                ),
            });
        }
    }
}
