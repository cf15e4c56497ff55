//! Threads with their own runtime, for work that no other work may delay: the renewal of the lease, the
//! answers to probes, the webhook's connections.
//!
//! A tokio runtime has few threads, and a task that computes occupies one of them. Work that shares not even
//! a thread with such tasks waits only for a processor.

use std::future::Future;
use std::io;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// The result of the work when it ends; an error if the work panicked.
pub type Ended<T> = oneshot::Receiver<T>;

/// Runs a future, together with the tasks that it spawns, on a thread of its own. Clients of the API must be
/// created inside `work`, because a connection lives on the runtime on which it was made.
///
/// # Errors
/// If the thread cannot be started.
pub fn start<T, F>(name: &str, work: impl FnOnce() -> F + Send + 'static) -> io::Result<Ended<T>>
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    on(name, || Builder::new_current_thread().enable_all().build(), work)
}

/// Like [`start`], with `threads` worker threads for the tasks that the future spawns.
///
/// # Errors
/// If the thread cannot be started.
pub fn start_with<T, F>(
    name: &'static str,
    threads: usize,
    work: impl FnOnce() -> F + Send + 'static,
) -> io::Result<Ended<T>>
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let build =
        move || Builder::new_multi_thread().worker_threads(threads).thread_name(name).enable_all().build();
    on(name, build, work)
}

fn on<T, F>(
    name: &str,
    build: impl FnOnce() -> io::Result<Runtime> + Send + 'static,
    work: impl FnOnce() -> F + Send + 'static,
) -> io::Result<Ended<T>>
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let (tell, ended) = oneshot::channel();
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(move || match build() {
        Ok(runtime) => {
            let result = runtime.block_on(async { work().await });
            // Nobody waits for tasks that are left.
            runtime.shutdown_background();
            // Whoever does not listen any more does not need the result.
            let _ = tell.send(result);
        }
        Err(error) => tracing::error!(%error, "a runtime cannot be made"),
    })?;
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn work_on_its_own_thread_goes_on_while_the_runtime_that_started_it_is_blocked() {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (tell, told) = mpsc::channel();
        runtime.block_on(async {
            let ended = start("own", move || async move {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                tell.send(()).expect("somebody listens");
                7
            });
            // The one thread of this runtime waits here, and nothing of it runs.
            told.recv().expect("it went on");
            assert_eq!(ended.expect("a thread").await, Ok(7));
        });
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_whoever_waits() {
        let ended = start("panics", || async { panic!("on purpose") });
        let ended: Result<(), _> = ended.expect("a thread").await;
        assert!(ended.is_err());
    }
}
