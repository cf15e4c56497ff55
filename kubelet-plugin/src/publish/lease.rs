//! Finds out whether a controller is alive. Clocks of other machines are not trusted: a Lease is alive while
//! it changes.

use super::call::call;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use std::time::Duration;
use tokio::time::Instant;

/// The interval between looks during a hand-over.
pub(super) const POLL: Duration = Duration::from_secs(2);

/// The observed state of the controller's Lease.
#[derive(Debug, Default)]
pub(super) struct ControllerLease {
    renewed: Option<Timestamp>,
    changed_at: Option<Timestamp>,
    absent_since: Option<Timestamp>,
    polled: Option<Instant>,
}

impl ControllerLease {
    /// Returns the time since which no controller has been alive, without interruption.
    pub(super) const fn absent_since(&self) -> Option<Timestamp> {
        self.absent_since
    }

    /// Reads the Lease. If it cannot be read, the controller counts as alive.
    pub(super) async fn poll(&mut self, client: &Client, namespace: &str, name: &str, now: Timestamp) {
        if self.polled.is_some_and(|at| at.elapsed() < POLL / 2) {
            return;
        }
        self.polled = Some(Instant::now());
        let api: Api<Lease> = Api::namespaced(client.clone(), namespace);
        match call("read the controller's Lease", api.get_opt(name)).await {
            Ok(lease) => self.note(lease.as_ref(), now),
            Err(error) => {
                tracing::debug!(%error, "cannot tell whether the controller is alive");
                self.absent_since = None;
            }
        }
    }

    fn note(&mut self, lease: Option<&Lease>, now: Timestamp) {
        let spec = lease.and_then(|lease| lease.spec.as_ref());
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0);
        if renewed != self.renewed || self.changed_at.is_none() {
            self.renewed = renewed;
            self.changed_at = Some(now);
        }
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(15).max(1);
        let unchanged = self.changed_at.map_or(0, |at| now.as_second() - at.as_second());
        let alive = !holder.is_empty() && unchanged <= i64::from(seconds);
        self.absent_since = if alive { None } else { self.absent_since.or(Some(now)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn lease(holder: &str, renewed: &str) -> Lease {
        serde_json::from_value(json!({"metadata": {}, "spec": {
            "holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}}))
        .unwrap()
    }

    #[test]
    fn a_lease_is_alive_while_it_changes_whatever_its_times_say() {
        let mut view = ControllerLease::default();
        let (old, older) = ("2001-01-01T00:00:00.000000Z", "2000-01-01T00:00:00.000000Z");
        view.note(Some(&lease("a", old)), time(100));
        assert_eq!(view.absent_since(), None);
        view.note(Some(&lease("a", old)), time(115));
        assert_eq!(view.absent_since(), None);
        view.note(Some(&lease("a", old)), time(116));
        view.note(Some(&lease("a", old)), time(130));
        assert_eq!(view.absent_since(), Some(time(116)));
        view.note(Some(&lease("a", older)), time(131));
        assert_eq!(view.absent_since(), None);
    }

    #[test]
    fn no_lease_and_a_lease_without_holder_are_nobody() {
        for nobody in [None, Some(lease("", "2001-01-01T00:00:00.000000Z"))] {
            let mut view = ControllerLease::default();
            view.note(nobody.as_ref(), time(7));
            assert_eq!(view.absent_since(), Some(time(7)));
        }
    }
}
