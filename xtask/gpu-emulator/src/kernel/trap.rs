//! Memory faults of kernels: reported, as a GPU does, instead of ending the process.
//!
//! A handler of SIGSEGV and SIGBUS makes the fiber that faulted return to the executor. What other code
//! faults goes to the handler that was there before.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Once;

use corosensei::trap::TrapHandlerRegs;
use libc::{
    SA_ONSTACK, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGBUS, SIGSEGV, sigaction, siginfo_t, ucontext_t,
};

use super::thread::Fiber;

thread_local! {
    /// The fiber that runs on this thread.
    static RUNNING: Cell<*const Fiber> = const { Cell::new(null()) };
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
    });
}

/// Runs `resume` while a fault on `fiber` makes it return.
pub(super) fn guarded<R>(fiber: &mut Fiber, resume: impl FnOnce(&mut Fiber) -> R) -> R {
    RUNNING.set(fiber);
    let result = resume(fiber);
    RUNNING.set(null());
    result
}

unsafe extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes both, valid until the handler returns.
    let (address, context) = unsafe { ((*info).si_addr(), &mut *context.cast::<ucontext_t>()) };
    let fiber = RUNNING.get();
    if !fiber.is_null() {
        // SAFETY: set while the fiber lives and runs, by this thread.
        let trap = unsafe { (*fiber).trap_handler() };
        if trap.stack_ptr_in_bounds(stack_pointer(context)) {
            let address = address.addr() as u64;
            // SAFETY: the stack pointer is the fiber's, and its registers are replaced. A kernel's frames
            // own nothing; those of `ask` leak a list at most.
            let registers = unsafe { trap.setup_trap_handler(move || Some(address)) };
            go_on_at(context, &registers);
            return;
        }
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
