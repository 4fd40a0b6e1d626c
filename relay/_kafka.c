/* Batches into librdkafka and acknowledgements out of it, without Python in between.
 *
 * Optional, as _hot.c is: the Python code (sink/kafka_session.py) is the reference, and does without it.
 * confluent-kafka takes Python's lock for every event's report, and makes an object of it. Here librdkafka's own threads
 * count: this library is also a librdkafka plugin, whose interceptor sees every event that is acknowledged or given up.
 * Only when all events of a batch are reported, or one failed, is the event loop woken, through a descriptor.
 *
 * It must never count an event as stored that is not: stored is what librdkafka calls PERSISTED and has no error.
 * librdkafka is the very one that confluent-kafka has loaded (found through its module), never another copy; of its
 * interface only what is public and unchanged since 1.5 is used.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define EVENT_FIELDS 9 /* id, topic, key, header_names, header_values, body, table, transaction, ordinal */
#define FIXED 6 /* arguments of an event that are not headers */

/* ------------------------------------------------------------------------------------- from rdkafka.h, as it says */

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_conf_s rd_kafka_conf_t;
typedef struct rd_kafka_error_s rd_kafka_error_t;

typedef struct {
    int err;
    void *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *opaque;
} Message;

typedef struct {
    int type;
    union {
        const char *text;
        int number;
        struct {
            const void *at;
            size_t size;
        } bytes;
        struct {
            const char *name;
            const void *at;
            Py_ssize_t size;
        } header;
        void *pointer;
        char reserved[64];
    } as;
} Argument;

enum { TOPIC = 1, PARTITION = 3, VALUE = 4, KEY = 5, OPAQUE = 6, FLAGS = 7, HEADER = 9 };
enum { COPY = 2, PERSISTED = 2, UNKNOWN = -1, INCONSISTENT = -149, FATAL = -150 };

typedef void OnDestroy(void *);
typedef int OnNew(rd_kafka_t *, const rd_kafka_conf_t *, void *, char *, size_t);
typedef int OnAcknowledgement(rd_kafka_t *, Message *, void *);

static struct {
    int (*version)(void);
    rd_kafka_error_t *(*produce)(rd_kafka_t *, const Argument *, size_t);
    int (*code)(const rd_kafka_error_t *);
    int (*is_fatal)(const rd_kafka_error_t *);
    void (*forget)(rd_kafka_error_t *);
    int (*set)(rd_kafka_conf_t *, const char *, const char *, char *, size_t);
    int (*status)(const Message *);
    int (*on_new)(rd_kafka_conf_t *, const char *, OnNew *, void *);
    int (*on_conf_destroy)(rd_kafka_conf_t *, const char *, OnDestroy *, void *);
    int (*on_acknowledgement)(rd_kafka_t *, const char *, OnAcknowledgement *, void *);
} lib;

/* ------------------------------------------------------------------------------------------------------ the count */

typedef struct {
    uint32_t index;
    int err;
} Failure;

typedef struct { /* of one batch */
    long sent, acked;
    Failure *failures;
    long failed, room;
    int used, sealed, told; /* sealed: nothing more is sent; told: waits in `news` */
} Slot;

typedef struct { /* lives as long as its Tally and its librdkafka do, whoever is last */
    pthread_mutex_t lock;
    int owners;
    int wake;
    int unheard; /* the descriptor is written, and nobody has looked yet */
    rd_kafka_t *kafka;
    Slot *slots;
    long slot_count, slot_room;
    long lowest; /* all slots before it are used */
    long *news; /* slots with something to say */
    long news_count, news_room;
    int broken; /* out of memory: nothing can be said of what is missing here, and nothing is */
} Count;

typedef struct {
    PyObject_HEAD
    Count *count;
} Tally;

static __thread Count *arming; /* the Tally whose producer is being made, on this thread */

static void
let_go(Count *count)
{
    pthread_mutex_lock(&count->lock);
    int owners = --count->owners;
    pthread_mutex_unlock(&count->lock);
    if (owners)
        return;
    for (long i = 0; i < count->slot_count; i++)
        free(count->slots[i].failures);
    free(count->slots);
    free(count->news);
    close(count->wake);
    pthread_mutex_destroy(&count->lock);
    free(count);
}

/* Room for one more; 0: there is none. */
static int
grow(void **items, long count, long *room, size_t size)
{
    if (count < *room)
        return 1;
    long wanted = *room ? *room * 2 : 16;
    void *more = realloc(*items, wanted * size);
    if (!more)
        return 0;
    *items = more;
    *room = wanted;
    return 1;
}

/* Say that a slot has news; with the lock. */
static void
tell(Count *count, long number)
{
    Slot *slot = &count->slots[number];
    if (!slot->told) {
        if (!grow((void **)&count->news, count->news_count, &count->news_room, sizeof *count->news)) {
            count->broken = 1;
            return;
        }
        count->news[count->news_count++] = number;
        slot->told = 1;
    }
    if (!count->unheard) {
        uint64_t one = 1;
        count->unheard = write(count->wake, &one, sizeof one) == sizeof one;
    }
}

static int
is_complete(const Slot *slot)
{
    return slot->sealed && slot->acked + slot->failed == slot->sent;
}

/* Of every event, once, on a thread of librdkafka. */
static int
acknowledged(rd_kafka_t *Py_UNUSED(kafka), Message *message, void *opaque)
{
    uintptr_t mark = (uintptr_t)message->opaque;
    if (!(mark & 1)) /* a pointer: an event that confluent-kafka sent */
        return 0;
    message->opaque = NULL; /* it would take it for its own; with NULL it does nothing */
    Count *count = opaque;
    long number = (long)(mark >> 32);
    pthread_mutex_lock(&count->lock);
    Slot *slot = &count->slots[number];
    /* Without an offset no broker has said so: librdkafka infers it from an event behind (kafka_policy.fault). */
    if (!message->err && lib.status(message) == PERSISTED && message->offset >= 0)
        slot->acked++;
    else if (grow((void **)&slot->failures, slot->failed, &slot->room, sizeof *slot->failures))
        slot->failures[slot->failed++] =
            (Failure){(uint32_t)(mark & 0xffffffff) >> 1, message->err ? message->err : INCONSISTENT};
    else
        count->broken = 1;
    if (slot->failed || is_complete(slot))
        tell(count, number);
    pthread_mutex_unlock(&count->lock);
    return 0;
}

static int
made(rd_kafka_t *kafka, const rd_kafka_conf_t *Py_UNUSED(conf), void *opaque, char *Py_UNUSED(text),
     size_t Py_UNUSED(size))
{
    Count *count = opaque;
    int failed = lib.on_acknowledgement(kafka, "relay", acknowledged, count);
    if (!failed)
        count->kafka = kafka;
    return failed;
}

/* Called last of all: librdkafka's threads have ended by then. */
static void
destroyed(void *opaque)
{
    ((Count *)opaque)->kafka = NULL;
    let_go(opaque);
}

/* What librdkafka calls in a library that plugin.library.paths names. */
__attribute__((visibility("default"))) int
conf_init(rd_kafka_conf_t *conf, void **Py_UNUSED(plugin), char *text, size_t size)
{
    Count *count = arming;
    if (!count)
        return 0;
    arming = NULL;
    int failed = lib.on_conf_destroy(conf, "relay", destroyed, count);
    if (failed)
        return failed;
    pthread_mutex_lock(&count->lock);
    count->owners++;
    pthread_mutex_unlock(&count->lock);
    /* Of what is stored nobody else needs to hear; its memory is free at once. */
    if (lib.set(conf, "delivery.report.only.error", "true", text, size))
        return UNKNOWN;
    return lib.on_new(conf, "relay", made, count);
}

/* ----------------------------------------------------------------------------------------------- the Python object */

static PyObject *
Tally_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    if (!lib.produce)
        return PyErr_Format(PyExc_RuntimeError, "librdkafka was not found");
    Tally *self = (Tally *)type->tp_alloc(type, 0);
    Count *count = self ? calloc(1, sizeof *count) : NULL;
    if (!count) {
        Py_XDECREF(self);
        return PyErr_NoMemory();
    }
    count->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (count->wake < 0) {
        free(count);
        Py_DECREF(self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    pthread_mutex_init(&count->lock, NULL);
    count->owners = 1;
    self->count = count;
    return (PyObject *)self;
}

static void
Tally_dealloc(Tally *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->count) {
        if (arming == self->count)
            arming = NULL;
        let_go(self->count);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

PyDoc_STRVAR(arm_doc, "arm()\n\nThe next producer that this thread makes with the plugin is the one to count.");

static PyObject *
Tally_arm(Tally *self, PyObject *Py_UNUSED(none))
{
    arming = self->count;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(armed_doc, "armed() -> bool\n\nWhether the producer that was made is counted.");

static PyObject *
Tally_armed(Tally *self, PyObject *Py_UNUSED(none))
{
    if (arming == self->count)
        arming = NULL;
    return PyBool_FromLong(self->count->kafka != NULL);
}

static PyObject *
Tally_fileno(Tally *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLong(self->count->wake);
}

PyDoc_STRVAR(launch_doc, "launch() -> int\n\nA slot for a batch.");

static PyObject *
Tally_launch(Tally *self, PyObject *Py_UNUSED(none))
{
    Count *count = self->count;
    pthread_mutex_lock(&count->lock);
    long number = count->lowest;
    while (number < count->slot_count && count->slots[number].used)
        number++;
    int fits = number < count->slot_count ||
               grow((void **)&count->slots, count->slot_count, &count->slot_room, sizeof *count->slots);
    if (fits) {
        if (number == count->slot_count)
            count->slots[count->slot_count++] = (Slot){0};
        count->slots[number].used = 1;
        count->lowest = number + 1;
    }
    pthread_mutex_unlock(&count->lock);
    return fits ? PyLong_FromLong(number) : PyErr_NoMemory();
}

/* The slot of that number, with the lock taken; NULL with an exception and without it. */
static Slot *
slot_of(Count *count, long number)
{
    pthread_mutex_lock(&count->lock);
    if (number >= 0 && number < count->slot_count && count->slots[number].used)
        return &count->slots[number];
    pthread_mutex_unlock(&count->lock);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no such slot");
    return NULL;
}

/* A text as C has it; NULL without an exception: declined. */
static const char *
c_text(PyObject *text)
{
    Py_ssize_t size;
    const char *at = PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &size) : NULL;
    if (!at)
        PyErr_Clear(); /* a lone surrogate: Python finds the words */
    return at && strlen(at) == (size_t)size ? at : NULL;
}

typedef struct { /* an event as librdkafka wants it */
    Argument *arguments; /* TOPIC, KEY, VALUE, OPAQUE, FLAGS, PARTITION, then the headers */
    PyObject *topic, *header_names, *names; /* what the arguments hold now; `names` is owned */
    PyObject *keys; /* which may go to the topic; None: all */
    Py_ssize_t room;
} Draft;

/* The headers' names, once for all events that share them; 0 with an exception: no memory. */
static int
name_headers(Draft *draft, PyObject *header_names)
{
    draft->header_names = header_names;
    Py_XSETREF(draft->names, PyObject_GetAttrString(header_names, "names"));
    if (!draft->names || !PyTuple_Check(draft->names)) {
        PyErr_Clear();
        Py_CLEAR(draft->names);
        return 1;
    }
    Py_ssize_t wanted = FIXED + PyTuple_GET_SIZE(draft->names);
    if (wanted > draft->room) {
        Argument *more = PyMem_Realloc(draft->arguments, wanted * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return 0;
        }
        draft->arguments = more;
        draft->room = wanted;
    }
    for (Py_ssize_t i = FIXED; i < wanted; i++) {
        draft->arguments[i].type = HEADER;
        draft->arguments[i].as.header.name = c_text(PyTuple_GET_ITEM(draft->names, i - FIXED));
        if (!draft->arguments[i].as.header.name) {
            Py_CLEAR(draft->names);
            return 1;
        }
    }
    return 1;
}

static void
put(Argument *argument, int type, PyObject *bytes)
{
    argument->type = type;
    argument->as.bytes.at = bytes == Py_None ? NULL : PyBytes_AS_STRING(bytes);
    argument->as.bytes.size = bytes == Py_None ? 0 : PyBytes_GET_SIZE(bytes);
}

/* How many arguments describe the event; 0: it cannot be written, or it is not ready, or an exception. */
static Py_ssize_t
describe(Draft *draft, PyObject *event, PyObject *ready, uintptr_t mark, int partition)
{
    if (!PyTuple_Check(event) || PyTuple_GET_SIZE(event) != EVENT_FIELDS)
        return 0;
    PyObject *topic = PyTuple_GET_ITEM(event, 1), *key = PyTuple_GET_ITEM(event, 2);
    PyObject *values = PyTuple_GET_ITEM(event, 4), *body = PyTuple_GET_ITEM(event, 5);
    if (PyTuple_GET_ITEM(event, 3) != draft->header_names && !name_headers(draft, PyTuple_GET_ITEM(event, 3)))
        return 0;
    if (!draft->names || !PyTuple_Check(values) || PyTuple_GET_SIZE(values) != PyTuple_GET_SIZE(draft->names) ||
        (key != Py_None && !PyBytes_Check(key)) || (body != Py_None && !PyBytes_Check(body)))
        return 0;
    Argument *arguments = draft->arguments;
    if (topic != draft->topic) {
        draft->topic = topic;
        arguments[0].type = TOPIC;
        draft->keys = PyUnicode_Check(topic) ? PyDict_GetItemWithError(ready, topic) : NULL;
        arguments[0].as.text = draft->keys ? c_text(topic) : NULL;
    }
    if (!arguments[0].as.text)
        return 0;
    if (draft->keys != Py_None &&
        (key == Py_None || !PySet_Check(draft->keys) || PySet_Contains(draft->keys, key) != 1))
        return 0;
    put(&arguments[1], KEY, key);
    put(&arguments[2], VALUE, body);
    arguments[3].type = OPAQUE;
    arguments[3].as.pointer = (void *)mark;
    arguments[4].type = FLAGS;
    arguments[4].as.number = COPY;
    arguments[5].type = PARTITION;
    arguments[5].as.number = partition;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *value = PyTuple_GET_ITEM(values, i);
        if (!PyBytes_Check(value))
            return 0;
        arguments[FIXED + i].as.header.at = PyBytes_AS_STRING(value);
        arguments[FIXED + i].as.header.size = PyBytes_GET_SIZE(value);
    }
    return FIXED + PyTuple_GET_SIZE(values);
}

/* A refused event may have been reported before it was refused; it is not ours then. */
static void
unsend(Count *count, long number, uint32_t index)
{
    pthread_mutex_lock(&count->lock);
    Slot *slot = &count->slots[number];
    for (long i = 0; i < slot->failed; i++)
        if (slot->failures[i].index == index)
            slot->failures[i--] = slot->failures[--slot->failed];
    pthread_mutex_unlock(&count->lock);
}

PyDoc_STRVAR(produce_doc, "produce(slot, events, at, stop, ready, partition=-1) -> (at, code)\n\n"
                          "Hand over the events from `at` up to `stop` as long as their topics are in `ready`, and their\n"
                          "keys among the topic's (None: all, and no key); returns where it stopped, and librdkafka's\n"
                          "code if it does not take that event, else 0. -1: librdkafka chooses the partition.");

static PyObject *
Tally_produce(Tally *self, PyObject *args)
{
    long number;
    int partition = -1;
    Py_ssize_t at, stop;
    PyObject *events, *ready;
    if (!PyArg_ParseTuple(args, "lO!nnO!|i", &number, &PyList_Type, &events, &at, &stop, &PyDict_Type, &ready,
                          &partition))
        return NULL;
    Count *count = self->count;
    if (!count->kafka || at < 0) {
        PyErr_SetString(PyExc_ValueError, "no producer was made with this tally");
        return NULL;
    }
    if (!slot_of(count, number))
        return NULL;
    pthread_mutex_unlock(&count->lock);
    Draft draft = {0};
    long sent = 0;
    int code = 0;
    for (; at < stop && at < PyList_GET_SIZE(events) && at < INT32_MAX; at++) {
        uintptr_t mark = (uintptr_t)number << 32 | (uintptr_t)at << 1 | 1;
        Py_ssize_t size = describe(&draft, PyList_GET_ITEM(events, at), ready, mark, partition);
        if (!size)
            break;
        rd_kafka_error_t *error = lib.produce(count->kafka, draft.arguments, size);
        if (error) {
            code = lib.is_fatal(error) ? FATAL : lib.code(error);
            lib.forget(error);
            unsend(count, number, (uint32_t)at);
            break;
        }
        sent++;
    }
    Py_XDECREF(draft.names);
    PyMem_Free(draft.arguments);
    pthread_mutex_lock(&count->lock);
    count->slots[number].sent += sent;
    pthread_mutex_unlock(&count->lock);
    return PyErr_Occurred() ? NULL : Py_BuildValue("(ni)", at, code);
}

PyDoc_STRVAR(seal_doc, "seal(slot)\n\nNothing more is sent: when everything is reported, that is news.");

static PyObject *
Tally_seal(Tally *self, PyObject *number)
{
    Slot *slot = slot_of(self->count, PyLong_AsLong(number));
    if (!slot)
        return NULL;
    slot->sealed = 1;
    if (is_complete(slot))
        tell(self->count, slot - self->count->slots);
    pthread_mutex_unlock(&self->count->lock);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(news_doc, "news() -> list[int]\n\n"
                       "Slots that are sealed and wholly reported, or of which an event failed, since the last call.");

static PyObject *
Tally_news(Tally *self, PyObject *Py_UNUSED(none))
{
    Count *count = self->count;
    uint64_t times;
    pthread_mutex_lock(&count->lock);
    if (count->unheard && read(count->wake, &times, sizeof times) == sizeof times)
        count->unheard = 0;
    PyObject *list = PyList_New(count->news_count);
    for (long i = 0; list && i < count->news_count; i++) {
        PyObject *number = PyLong_FromLong(count->news[i]);
        if (!number)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    if (list) {
        for (long i = 0; i < count->news_count; i++)
            count->slots[count->news[i]].told = 0;
        count->news_count = 0;
    }
    pthread_mutex_unlock(&count->lock);
    return list;
}

PyDoc_STRVAR(report_doc, "report(slot) -> (acked, [(index, code), …])\n\n"
                         "How many events were stored, and which ones were not; all others are not reported yet.");

static PyObject *
Tally_report(Tally *self, PyObject *number)
{
    Count *count = self->count;
    Slot *slot = slot_of(count, PyLong_AsLong(number));
    if (!slot)
        return NULL;
    PyObject *failures = count->broken ? PyErr_NoMemory() : PyList_New(slot->failed);
    for (long i = 0; failures && i < slot->failed; i++) {
        PyObject *failure = Py_BuildValue("(Ii)", slot->failures[i].index, slot->failures[i].err);
        if (!failure)
            Py_CLEAR(failures);
        else
            PyList_SET_ITEM(failures, i, failure);
    }
    long acked = slot->acked;
    pthread_mutex_unlock(&count->lock);
    return failures ? Py_BuildValue("(lN)", acked, failures) : NULL;
}

PyDoc_STRVAR(clear_doc, "clear(slot)\n\nThe slot is free again; not before everything in it is reported.");

static PyObject *
Tally_clear(Tally *self, PyObject *number)
{
    Count *count = self->count;
    Slot *slot = slot_of(count, PyLong_AsLong(number));
    if (!slot)
        return NULL;
    int complete = slot->acked + slot->failed == slot->sent;
    if (complete) {
        for (long i = 0; i < count->news_count; i++)
            if (slot->told && &count->slots[count->news[i]] == slot)
                count->news[i--] = count->news[--count->news_count];
        free(slot->failures);
        *slot = (Slot){0};
        if (slot - count->slots < count->lowest)
            count->lowest = slot - count->slots;
    }
    pthread_mutex_unlock(&count->lock);
    if (complete)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "not everything in the slot is reported");
    return NULL;
}

static PyMethodDef tally_methods[] = {
    {"arm", (PyCFunction)Tally_arm, METH_NOARGS, arm_doc},
    {"armed", (PyCFunction)Tally_armed, METH_NOARGS, armed_doc},
    {"fileno", (PyCFunction)Tally_fileno, METH_NOARGS, NULL},
    {"launch", (PyCFunction)Tally_launch, METH_NOARGS, launch_doc},
    {"produce", (PyCFunction)Tally_produce, METH_VARARGS, produce_doc},
    {"seal", (PyCFunction)Tally_seal, METH_O, seal_doc},
    {"news", (PyCFunction)Tally_news, METH_NOARGS, news_doc},
    {"report", (PyCFunction)Tally_report, METH_O, report_doc},
    {"clear", (PyCFunction)Tally_clear, METH_O, clear_doc},
    {NULL},
};

static PyType_Slot tally_slots[] = {
    {Py_tp_doc, "Hands batches to one librdkafka producer, and counts what it stored of them."},
    {Py_tp_new, Tally_new},
    {Py_tp_dealloc, Tally_dealloc},
    {Py_tp_methods, tally_methods},
    {0, NULL},
};

static PyType_Spec tally_spec = {
    .name = "relay._kafka.Tally",
    .basicsize = sizeof(Tally),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = tally_slots,
};

PyDoc_STRVAR(find_doc, "find(path) -> bool\n\n"
                       "Use the librdkafka that the loaded module at `path` is linked with; False if it is unknown.");

static PyObject *
find(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    void *module = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!module || sizeof(void *) != 8 || sizeof(Argument) != 72)
        Py_RETURN_FALSE;
    const struct {
        const char *name;
        void *into;
    } needed[] = {
        {"rd_kafka_version", &lib.version},
        {"rd_kafka_error_code", &lib.code},
        {"rd_kafka_error_is_fatal", &lib.is_fatal},
        {"rd_kafka_error_destroy", &lib.forget},
        {"rd_kafka_conf_set", &lib.set},
        {"rd_kafka_message_status", &lib.status},
        {"rd_kafka_conf_interceptor_add_on_new", &lib.on_new},
        {"rd_kafka_conf_interceptor_add_on_conf_destroy", &lib.on_conf_destroy},
        {"rd_kafka_interceptor_add_on_acknowledgement", &lib.on_acknowledgement},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!(*(void **)needed[i].into = dlsym(module, needed[i].name)))
            Py_RETURN_FALSE;
    if (lib.version() >> 24 != 2) /* a new major version may lay its structures out anew */
        Py_RETURN_FALSE;
    *(void **)&lib.produce = dlsym(module, "rd_kafka_produceva");
    return PyBool_FromLong(lib.produce != NULL);
}

static PyMethodDef functions[] = {
    {"find", find, METH_VARARGS, find_doc},
    {NULL},
};

static int
fill(PyObject *module)
{
    PyObject *tally = PyType_FromSpec(&tally_spec);
    int failed = tally ? PyModule_AddObjectRef(module, "Tally", tally) : -1;
    Py_XDECREF(tally);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "relay._kafka",
    .m_doc = "Batches into librdkafka, acknowledgements out of it; see _kafka.c.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__kafka(void)
{
    return PyModuleDef_Init(&definition);
}
