//! Threads with a runtime of their own, for work that no other work may delay: the renewal of the lease, the answers
//! to probes, the webhook's connections.
//!
//! A tokio runtime has few threads, and a task that computes keeps one of them. What shares nothing with such tasks,
//! not even a thread, waits for nothing but a processor.

use std::future::Future;
use std::io;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// The work's result, when it ends; an error if it ended in a panic.
pub type Ended<T> = oneshot::Receiver<T>;

/// Runs a future on a thread of its own, together with what it spawns. Clients of the API must be made inside, as a
/// connection lives on the runtime that it was made on.
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

/// The same, with `threads` for the tasks that the future spawns.
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
            // What it spawned and did not wait for is nobody's.
            runtime.shutdown_background();
            // Whoever does not listen any more does not need it.
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
