//! Memory faults of kernels and loops without end: reported, instead of ending the process or never.
//!
//! A handler of SIGSEGV and SIGBUS makes the fiber that faulted return to the executor. What other code
//! faults goes to the handler that was there before. A timer of the thread's own time does the same to
//! a kernel that has run for too long: `EP_EMULATOR_LIMIT_S` seconds of the processor, 120 without it.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::{Once, OnceLock};

use corosensei::CoroutineResult;
use corosensei::trap::TrapHandlerRegs;
use libc::{
    CLOCK_THREAD_CPUTIME_ID, SA_ONSTACK, SA_RESTART, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGBUS,
    SIGEV_THREAD_ID, SIGSEGV, SIGVTALRM, itimerspec, sigaction, sigevent, siginfo_t, timer_t,
    timespec, ucontext_t,
};

use super::thread::{End, Fiber, Thread};

thread_local! {
    /// The fiber that runs on this thread, and its control block if it is a kernel's.
    static RUNNING: Cell<(*const Fiber, *const Thread)> = const { Cell::new((null(), null())) };
}

static BEFORE: [Previous; 2] = [Previous::new(), Previous::new()];

/// The action that a handler replaced.
struct Previous(std::cell::UnsafeCell<MaybeUninit<sigaction>>);

// SAFETY: written once by `install`, before the handler that reads it is there.
unsafe impl Sync for Previous {}

impl Previous {
    const fn new() -> Self {
        Previous(std::cell::UnsafeCell::new(MaybeUninit::zeroed()))
    }
}

/// Puts the handlers in place; once.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (signal, before) in [SIGSEGV, SIGBUS].into_iter().zip(&BEFORE) {
            // SAFETY: a zeroed `sigaction` is a valid one; both structs outlive the calls.
            unsafe {
                let mut action: sigaction = std::mem::zeroed();
                action.sa_sigaction = handle as *const () as usize;
                action.sa_flags = SA_SIGINFO | SA_ONSTACK;
                libc::sigemptyset(&mut action.sa_mask);
                // What was there is known before the handler that asks for it is.
                sigaction(signal, null(), before.0.get().cast());
                sigaction(signal, &action, null_mut());
            }
        }
        // SAFETY: as above. Nobody else is known to use this signal.
        unsafe {
            let mut action: sigaction = std::mem::zeroed();
            action.sa_sigaction = tick as *const () as usize;
            action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
            libc::sigemptyset(&mut action.sa_mask);
            sigaction(SIGVTALRM, &action, null_mut());
        }
    });
}

/// Where a thread of the system says which fiber it runs: asked for once, used for every switch.
#[derive(Clone, Copy)]
pub(super) struct Here<'a>(&'a Cell<(*const Fiber, *const Thread)>);

/// Runs `body` with this thread's place.
pub(super) fn here<R>(body: impl FnOnce(Here<'_>) -> R) -> R {
    RUNNING.with(|running| body(Here(running)))
}

impl Here<'_> {
    /// Resumes a fiber; a fault on it makes it return, and so does the clock while `thread`, if there is
    /// one, runs the kernel's code.
    pub(super) fn resume(
        self,
        fiber: &mut Fiber,
        thread: *const Thread,
    ) -> CoroutineResult<(), End> {
        self.0.set((fiber, thread));
        let result = fiber.resume(());
        self.0.set((null(), null()));
        result
    }
}

/// Makes the fiber that runs return `end`. False if the context is not a fiber's.
fn leave(context: &mut ucontext_t, end: End) -> bool {
    let (fiber, _) = RUNNING.get();
    if fiber.is_null() {
        return false;
    }
    // SAFETY: set while the fiber lives and runs, by this thread.
    let trap = unsafe { (*fiber).trap_handler() };
    if !trap.stack_ptr_in_bounds(stack_pointer(context)) {
        return false;
    }
    // SAFETY: the stack pointer is the fiber's, and its registers are replaced. A kernel's frames own
    // nothing; those of `ask` leak a list at most.
    let registers = unsafe { trap.setup_trap_handler(move || end) };
    go_on_at(context, &registers);
    true
}

/// The clock of a launch.
pub(super) struct Clock(Option<timer_t>);

impl Clock {
    /// Starts it; without a timer there is no limit.
    pub(super) fn start() -> Clock {
        let mut timer: timer_t = null_mut();
        // SAFETY: a zeroed `sigevent` is a valid one; both outlive the call.
        let code = unsafe {
            let mut event: sigevent = std::mem::zeroed();
            event.sigev_notify = SIGEV_THREAD_ID;
            event.sigev_signo = SIGVTALRM;
            event.sigev_notify_thread_id = libc::gettid();
            libc::timer_create(CLOCK_THREAD_CPUTIME_ID, &mut event, &mut timer)
        };
        if code != 0 {
            return Clock(None);
        }
        // Again and again, since the emulator's own code is not interrupted.
        let again = timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let first = timespec { tv_sec: limit_s(), tv_nsec: 0 };
        let time = itimerspec { it_interval: again, it_value: first };
        // SAFETY: a live timer, and a valid time that is not kept.
        unsafe { libc::timer_settime(timer, 0, &time, null_mut()) };
        Clock(Some(timer))
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if let Some(timer) = self.0 {
            // SAFETY: created once, deleted once.
            unsafe { libc::timer_delete(timer) };
        }
    }
}

fn limit_s() -> i64 {
    static LIMIT: OnceLock<i64> = OnceLock::new();
    let given = || std::env::var("EP_EMULATOR_LIMIT_S").ok()?.parse().ok().filter(|s| *s > 0);
    *LIMIT.get_or_init(|| given().unwrap_or(120))
}

unsafe extern "C" fn tick(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    let (_, thread) = RUNNING.get();
    // SAFETY: set while the thread's block lives.
    if !thread.is_null() && !unsafe { (&raw const (*thread).asking).read_volatile() } {
        // SAFETY: the kernel passes it, valid until the handler returns.
        leave(unsafe { &mut *context.cast() }, End::Endless);
    }
}

unsafe extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes both, valid until the handler returns.
    let (address, context) = unsafe { ((*info).si_addr(), &mut *context.cast::<ucontext_t>()) };
    if leave(context, End::Fault(address.addr() as u64)) {
        return;
    }
    // SAFETY: the arguments are this handler's own.
    unsafe { pass_on(signal, info, context) };
}

/// Lets the handler that was there before decide.
///
/// # Safety
/// The arguments are those of a signal that is being handled.
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) {
    let before = &BEFORE[usize::from(signal != SIGSEGV)];
    // SAFETY: zeroed or written by `install`, both of which are valid; not written any more.
    let before = unsafe { (*before.0.get()).assume_init_ref() };
    match before.sa_sigaction {
        SIG_DFL | SIG_IGN => {
            // The instruction runs again, and then without a handler.
            // SAFETY: restores an action that the system had given.
            unsafe { sigaction(signal, before, null_mut()) };
        }
        handler if before.sa_flags & SA_SIGINFO != 0 => {
            // SAFETY: an action with this flag holds a function of this signature.
            let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            // SAFETY: the arguments are the signal's.
            unsafe { handler(signal, info, context.cast()) };
        }
        handler => {
            // SAFETY: an action without the flag holds a function of this signature.
            let handler: unsafe extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            // SAFETY: as above.
            unsafe { handler(signal) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn stack_pointer(context: &ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
}

#[cfg(target_arch = "x86_64")]
fn go_on_at(context: &mut ucontext_t, registers: &TrapHandlerRegs) {
    let TrapHandlerRegs { rip, rsp, rbp, rdi, rsi } = *registers;
    let list = [
        (libc::REG_RIP, rip),
        (libc::REG_RSP, rsp),
        (libc::REG_RBP, rbp),
        (libc::REG_RDI, rdi),
        (libc::REG_RSI, rsi),
    ];
    for (register, value) in list {
        context.uc_mcontext.gregs[register as usize] = value as i64;
    }
}

#[cfg(target_arch = "aarch64")]
fn stack_pointer(context: &ucontext_t) -> usize {
    context.uc_mcontext.sp as usize
}

#[cfg(target_arch = "aarch64")]
fn go_on_at(context: &mut ucontext_t, registers: &TrapHandlerRegs) {
    let TrapHandlerRegs { pc, sp, x0, x1, x29, lr } = *registers;
    let machine = &mut context.uc_mcontext;
    (machine.pc, machine.sp) = (pc, sp);
    (machine.regs[0], machine.regs[1]) = (x0, x1);
    (machine.regs[29], machine.regs[30]) = (x29, lr);
}
