//! Leader election over a Lease, and the local fence: a controller that has not renewed the lease in time
//! does not write, whether it noticed or not.
//!
//! The fence in the API is a ValidatingAdmissionPolicy that compares the writer's pod name with the name that
//! the holder wrote into [`crate::fence`]. So the identity must be exactly the pod's name, and nobody leads
//! before that name is written. Time is the monotonic clock throughout; another holder's lease is judged by
//! how long it has not changed as seen from here, never by the time stamps in it.
//!
//! The election has its own thread, runtime and connection ([`Election`]), so no work of the leader delays a
//! renewal. A renewal therefore does not show that the leader works: the election looks at the leader's
//! [`Pulse`], and gives the lease up when decisions have stopped.

use crate::fence::Fence;
use crate::isolated::{self, Ended};
use crate::watchdog::{Pulse, Stalled};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The configuration of leader election.
#[derive(Debug, Clone)]
pub struct LeaseConfig {
    /// The namespace of the Lease.
    pub namespace: String,
    /// The name of the Lease.
    pub name: String,
    /// The identity of this controller: the name of its pod.
    pub identity: String,
    /// The duration after which a lease that is not renewed runs out.
    pub duration: Duration,
    /// The time for which this controller goes on without a renewal. It is shorter than `duration`, so that a
    /// write that was sent just before the end returns before another controller may write.
    pub renew_deadline: Duration,
    /// The time between two attempts.
    pub retry_period: Duration,
}

/// Returns the default renew deadline for a lease duration, in the proportion of client-go: 10 of 15 s.
pub fn usual_renew_deadline(duration: Duration) -> Duration {
    duration.mul_f64(2.0 / 3.0)
}

/// Returns the default pause between two attempts for a lease duration, in the proportion of client-go: 2 of
/// 15 s.
pub fn usual_retry_period(duration: Duration) -> Duration {
    duration.mul_f64(2.0 / 15.0)
}

impl LeaseConfig {
    /// Returns a configuration with the default proportions for a lease duration.
    pub fn new(namespace: &str, name: &str, identity: &str, duration: Duration) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity: identity.to_owned(),
            duration,
            renew_deadline: usual_renew_deadline(duration),
            retry_period: usual_retry_period(duration),
        }
    }

    /// Returns the time limit of a request that is sent while the lease is valid.
    pub fn write_timeout(&self) -> Duration {
        self.duration.saturating_sub(self.renew_deadline).max(Duration::from_millis(1))
    }
}

/// The local fence: the controller checks it before every write.
#[derive(Debug, Clone, Default)]
pub struct Leadership {
    valid_until: Arc<Mutex<Option<Instant>>>,
}

/// This controller does not hold the lease, or has not renewed it in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this controller does not hold the lease (any more)")]
pub struct NotLeader;

impl Leadership {
    /// Returns a leadership that lasts as long as the process (a year): for tools that run once, and for
    /// tests.
    pub fn unconditional() -> Self {
        let far = Instant::now() + Duration::from_secs(365 * 24 * 3600);
        Self { valid_until: Arc::new(Mutex::new(Some(far))) }
    }

    /// Returns an error if no write may be sent now.
    pub fn check(&self) -> Result<(), NotLeader> {
        match *self.valid_until.lock() {
            Some(until) if Instant::now() < until => Ok(()),
            _ => Err(NotLeader),
        }
    }

    fn set(&self, until: Option<Instant>) {
        *self.valid_until.lock() = until;
    }
}

/// The last change of another holder's lease, as seen from here.
#[derive(Debug)]
struct Observed {
    version: Option<String>,
    since: Instant,
}

/// A running election, on its own thread. If it is dropped before it ended, it ends at once and lets the
/// lease run out, as if the process had died.
#[derive(Debug)]
pub struct Election {
    /// True while this controller leads.
    pub leading: watch::Receiver<bool>,
    /// To be cancelled when nothing is written any more; then the lease is given up.
    pub drained: CancellationToken,
    /// The end of the election, with an error if it stopped by itself.
    pub ended: Ended<Result<(), ElectionError>>,
    _abandon: DropGuard,
}

/// The reason why an election ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum ElectionError {
    /// No client could be made for the lease.
    #[error("making a client for the lease: {0}")]
    Client(#[from] kube::Error),
    /// The leader's loop does not turn; the lease was given up.
    #[error(transparent)]
    Stalled(#[from] Stalled),
}

impl Election {
    /// Takes part in the election until `stop`, with a connection of its own. `account` is the service
    /// account that the admission policies read, if there are any. `leadership` is valid while this
    /// controller leads. A leader whose `pulse` stands still for `stall` loses the lease.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        connection: kube::Config,
        config: LeaseConfig,
        account: Option<String>,
        leadership: Leadership,
        (pulse, stall): (Pulse, Duration),
        stop: CancellationToken,
    ) -> std::io::Result<Self> {
        let (sender, leading) = watch::channel(false);
        let (drained, abandoned) = (CancellationToken::new(), CancellationToken::new());
        let (drains, abandon) = (drained.clone(), abandoned.clone().drop_guard());
        let ended = isolated::start("lease", move || async move {
            let client = Client::try_from(connection)?;
            let fence = account.map(|name| Fence::new(client.clone(), &config.namespace, &name));
            let voter = Voter { api: Api::namespaced(client, &config.namespace), config, fence, leadership };
            tokio::select! {
                ended = voter.run(&sender, (&pulse, stall), &drains, &stop) => ended.map_or(Ok(()), |e| Err(e.into())),
                () = abandoned.cancelled() => Ok(()),
            }
        })?;
        Ok(Self { leading, drained, ended, _abandon: abandon })
    }
}

/// A participant in the election.
struct Voter {
    api: Api<Lease>,
    config: LeaseConfig,
    fence: Option<Fence>,
    leadership: Leadership,
}

impl Voter {
    /// Runs until `stop`, or until decisions have stopped; then gives the lease up.
    async fn run(
        &self,
        leading: &watch::Sender<bool>,
        (pulse, stall): (&Pulse, Duration),
        drained: &CancellationToken,
        stop: &CancellationToken,
    ) -> Option<Stalled> {
        let Self { api, config, fence, leadership } = self;
        let mut observed: Option<Observed> = None;
        let mut held: Option<Lease> = None;
        let mut stands_still = pin!(pulse.watch(stall));
        let stalled = loop {
            let asked_at = Instant::now();
            let attempt = fenced_attempt(api, config, fence.as_ref(), held.as_ref(), &mut observed);
            match tokio::time::timeout(config.renew_deadline, attempt).await {
                Ok(Ok(Some(lease))) => {
                    held = Some(lease);
                    leadership.set(Some(asked_at + config.renew_deadline));
                    if leading.send_replace(true) {
                        tracing::trace!("lease renewed");
                    } else {
                        tracing::info!(identity = config.identity, "leading");
                    }
                }
                Ok(Ok(None)) => {
                    held = None;
                    leadership.set(None);
                    leading.send_replace(false);
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot reach the lease");
                    // The holder is unknown now, so the next attempt reads the lease.
                    held = None;
                }
                Err(_) => held = None,
            }
            if leadership.check().is_err() && leading.send_replace(false) {
                tracing::warn!("the lease was not renewed in time: standing back");
            }
            tokio::select! {
                () = tokio::time::sleep(config.retry_period) => {}
                stalled = &mut stands_still => break Some(stalled),
                () = stop.cancelled() => break None,
            }
        };
        leading.send_replace(false);
        if leadership.check().is_ok() {
            if stalled.is_some() {
                // No further write is sent. Nobody tells when writes under way have returned, so they get the
                // full time limit.
                leadership.set(None);
                tokio::time::sleep(config.write_timeout()).await;
            } else {
                // Writes under way finish first.
                let _ = tokio::time::timeout(config.write_timeout(), drained.cancelled()).await;
                leadership.set(None);
            }
            if let Err(error) = release(api, config).await {
                tracing::debug!(%error, "could not give up the lease; it runs out by itself");
            }
        }
        stalled
    }
}

/// Takes or renews the lease; returns it if this controller holds it afterwards and the policies know it.
async fn fenced_attempt(
    api: &Api<Lease>,
    config: &LeaseConfig,
    fence: Option<&Fence>,
    held: Option<&Lease>,
    observed: &mut Option<Observed>,
) -> Result<Option<Lease>, kube::Error> {
    let Some(fence) = fence else { return attempt(api, config, held, observed).await };
    let seen = fence.look().await?;
    let lease = attempt(api, config, held, observed).await?;
    if lease.is_some() {
        fence.close(&seen, &config.identity).await?;
    }
    Ok(lease)
}

/// Takes or renews the lease; returns it if this controller holds it afterwards.
async fn attempt(
    api: &Api<Lease>,
    config: &LeaseConfig,
    held: Option<&Lease>,
    observed: &mut Option<Observed>,
) -> Result<Option<Lease>, kube::Error> {
    let current = match held {
        Some(lease) => lease.clone(),
        None => match api.get_opt(&config.name).await? {
            Some(lease) => lease,
            None => {
                let lease = with_spec(
                    config,
                    ObjectMeta { name: Some(config.name.clone()), ..ObjectMeta::default() },
                    None,
                );
                return match api.create(&PostParams::default(), &lease).await {
                    Ok(lease) => Ok(Some(lease)),
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
                    Err(error) => Err(error),
                };
            }
        },
    };
    if !may_take(config, &current, observed, Instant::now()) {
        return Ok(None);
    }
    let meta = ObjectMeta { managed_fields: None, ..current.metadata.clone() };
    let wanted = with_spec(config, meta, current.spec.as_ref());
    match api.replace(&config.name, &PostParams::default(), &wanted).await {
        Ok(lease) => {
            *observed = None;
            Ok(Some(lease))
        }
        // Somebody else changed the lease. This controller may still hold it, so the next attempt reads it.
        Err(kube::Error::Api(status)) if status.code == 409 && held.is_some() => {
            Err(kube::Error::Api(status))
        }
        Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns true if the lease belongs to this controller, was given up, or has not changed for its duration as
/// seen from here.
fn may_take(config: &LeaseConfig, lease: &Lease, observed: &mut Option<Observed>, now: Instant) -> bool {
    let spec = lease.spec.as_ref();
    let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or("");
    if holder.is_empty() || holder == config.identity {
        return true;
    }
    let version = lease.metadata.resource_version.clone();
    match observed {
        Some(seen) if seen.version == version => {
            let lasts = spec
                .and_then(|spec| spec.lease_duration_seconds)
                .and_then(|seconds| u64::try_from(seconds).ok())
                .map_or(config.duration, Duration::from_secs);
            now.saturating_duration_since(seen.since) > lasts
        }
        _ => {
            *observed = Some(Observed { version, since: now });
            false
        }
    }
}

fn with_spec(config: &LeaseConfig, metadata: ObjectMeta, before: Option<&LeaseSpec>) -> Lease {
    let now = MicroTime(k8s_openapi::jiff::Timestamp::now());
    let stays = before.is_some_and(|spec| spec.holder_identity.as_deref() == Some(&config.identity));
    let transitions = before.and_then(|spec| spec.lease_transitions).unwrap_or(0);
    // Whole seconds, rounded up: no other controller may think that the lease ends earlier than this one
    // does.
    let seconds = config.duration.as_secs() + u64::from(config.duration.subsec_nanos() > 0);
    let spec = LeaseSpec {
        holder_identity: Some(config.identity.clone()),
        lease_duration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX)),
        acquire_time: if stays { before.and_then(|s| s.acquire_time.clone()) } else { Some(now.clone()) },
        renew_time: Some(now),
        lease_transitions: Some(if stays { transitions } else { transitions.saturating_add(1) }),
        preferred_holder: None,
        strategy: None,
    };
    Lease { metadata, spec: Some(spec) }
}

async fn release(api: &Api<Lease>, config: &LeaseConfig) -> Result<(), kube::Error> {
    let Some(lease) = api.get_opt(&config.name).await? else { return Ok(()) };
    let ours = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()) == Some(&config.identity);
    if !ours {
        return Ok(());
    }
    let mut given_up = lease;
    given_up.metadata.managed_fields = None;
    if let Some(spec) = &mut given_up.spec {
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
    }
    api.replace(&config.name, &PostParams::default(), &given_up).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> LeaseConfig {
        LeaseConfig::new("ns", "lease", "me", Duration::from_secs(15))
    }

    fn lease(holder: &str, version: &str) -> Lease {
        Lease {
            metadata: ObjectMeta { resource_version: Some(version.to_owned()), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_duration_seconds: Some(15),
                ..LeaseSpec::default()
            }),
        }
    }

    #[test]
    fn another_holder_is_left_alone_until_its_lease_has_not_changed_for_its_duration() {
        let (config, start, mut seen) = (config(), Instant::now(), None);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!may_take(&config, &lease("other", "1"), &mut seen, at(0)));
        assert!(!may_take(&config, &lease("other", "1"), &mut seen, at(14)));
        // It renewed, so the wait begins again.
        assert!(!may_take(&config, &lease("other", "2"), &mut seen, at(15)));
        assert!(!may_take(&config, &lease("other", "2"), &mut seen, at(29)));
        assert!(may_take(&config, &lease("other", "2"), &mut seen, at(31)));
    }

    #[test]
    fn a_lease_that_was_given_up_or_is_ours_is_taken_at_once() {
        assert!(may_take(&config(), &lease("", "1"), &mut None, Instant::now()));
        assert!(may_take(&config(), &lease("me", "1"), &mut None, Instant::now()));
    }

    #[test]
    fn a_leader_that_did_not_renew_may_not_write() {
        let leadership = Leadership::default();
        assert_eq!(leadership.check(), Err(NotLeader));
        leadership.set(Some(Instant::now() + Duration::from_secs(5)));
        assert_eq!(leadership.check(), Ok(()));
        leadership.set(Some(Instant::now()));
        assert_eq!(leadership.check(), Err(NotLeader));
    }

    #[test]
    fn a_write_that_is_sent_in_time_ends_before_another_may_lead() {
        let config = config();
        assert!(config.renew_deadline + config.write_timeout() <= config.duration);
    }
}
